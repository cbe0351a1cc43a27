"""All uses of torch's private interfaces, by subject (torch 2.11 to 2.13).

They are imported where they are used: DTensor alone takes a second, which would slow commands that
only read a recipe.
"""
