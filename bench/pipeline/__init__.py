"""The study of planned pipelines: figures of PipeWeaver and Cornstarch, and planning time and quality."""
