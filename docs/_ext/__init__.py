"""Build the site: Sphinx extensions, and generators of pages and translations."""
