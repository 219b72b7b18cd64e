"""`python -m holdfast`: the command line, where the console script is not on the path."""

from holdfast.cluster.commands.entry import main

main()
