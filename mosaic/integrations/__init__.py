"""Callbacks for training frameworks, which the extra ``examples`` installs."""
