"""Daily schedules of a recipe: files for systemd, Slurm, Kubernetes and cron, and their installation."""

from mosaic.retrain.templates.writing import KINDS, TemplateKind, next_steps, write_template

__all__ = ["KINDS", "TemplateKind", "next_steps", "write_template"]
