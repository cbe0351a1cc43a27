"""The plan of a recipe, as text, as JSON and as a page."""
