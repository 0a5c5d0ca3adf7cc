"""Callbacks for training frameworks; each needs its framework, which the extra ``examples`` installs."""
