"""Transforms: small one-tensor rules from which optimizers are composed."""
