"""Forms of products with an inverse, one module each. `rewrite` chooses one. A form returns None if it does not apply."""
