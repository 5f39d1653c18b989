"""L-BFGS, its line searches, and transforms made of them."""
