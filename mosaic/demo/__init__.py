"""The demo job: spoken digit triples, a three-encoder contrastive model, and a loop that knows nothing of Mosaic."""
