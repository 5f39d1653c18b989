"""L-BFGS, its line searches, and the links made of them."""
