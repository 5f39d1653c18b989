"""What the numbers of a training say, as text and as a picture."""
