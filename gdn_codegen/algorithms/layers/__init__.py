"""Pages of what layers compute around the members of the family, such as the short convolution before them."""
