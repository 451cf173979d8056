"""Forms of products with an inverse, one a module. `rewrite` chooses; None where a form does not apply."""
