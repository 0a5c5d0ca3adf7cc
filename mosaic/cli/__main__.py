"""``python -m mosaic.cli``: the command ``mosaic`` of this interpreter, wherever its script lies."""

from mosaic.cli.main import main

main()
