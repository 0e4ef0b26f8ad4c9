"""Kernels and their plain PyTorch twins. Imports torch and triton only."""
