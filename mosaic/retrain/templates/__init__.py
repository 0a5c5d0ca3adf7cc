"""What starts a recipe every day: files for systemd, Slurm, Kubernetes and cron, and what to do with them."""

from mosaic.retrain.templates.writing import KINDS, TemplateKind, next_steps, write_template

__all__ = ["KINDS", "TemplateKind", "next_steps", "write_template"]
