"""The one place that touches torch's private interfaces, by subject (torch 2.11 to 2.13).

They are imported where they are used: DTensor alone takes a second, which a command that only
reads a recipe should not pay.
"""
