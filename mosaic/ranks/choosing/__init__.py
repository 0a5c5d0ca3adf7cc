"""Before the loop: rank 0 profiles and solves (``plans``), and all ranks try what is worth it (``rank_trial``)."""
