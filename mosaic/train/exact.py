"""Several ranks with the whole model each, whose gradients are added in one order: equal bits on any number of them."""

from mosaic.train.crew import Crew


class ExactCrew(Crew):
    """To be made."""
