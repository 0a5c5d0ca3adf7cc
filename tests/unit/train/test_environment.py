"""What bits depend on: compared between the starts of a day."""

from __future__ import annotations

from dataclasses import replace

import torch

from mosaic.retrain.worker.environment import environment_here


def test_a_commit_that_git_could_not_say_is_no_difference_and_another_one_is():
    here = replace(environment_here(torch.device("cpu"), num_ranks=1, program="x"), commit="abc")
    assert replace(here, commit="").differences(here) == ()
    assert here.differences(replace(here, commit="")) == ()
    assert replace(here, commit="def").differences(here) == ("commit was abc and is def",)
    assert replace(here, threads=here.threads + 1).differences(here) != ()
