"""Passes that divide a program: into kernels, and a long sequence into parts with their warm-up."""
