"""The experiments of Springenberg, Klein, Falkner and Hutter 2016, and some that they leave open: `hookean reproduce`.

Each experiment has two functions: `measure` runs chains and writes tables of numbers into a folder, `draw` makes
figures and one page out of those tables. What the page says in words is computed from them, too.
"""
