"""What an optimizer object is called, saved and loaded by."""
