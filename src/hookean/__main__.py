"""`python -m hookean`."""

from hookean.cli import main

main()
