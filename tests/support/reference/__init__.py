"""What others compute: the papers' loops, and what optax, pycma and older versions have stored."""
