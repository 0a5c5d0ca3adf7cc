"""The study of planned pipelines: figures of PipeWeaver and Cornstarch, and how fast and how good planning is."""
