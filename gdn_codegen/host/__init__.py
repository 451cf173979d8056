"""What generated modules do around their kernels, as plain Python that is copied into them word for word."""
