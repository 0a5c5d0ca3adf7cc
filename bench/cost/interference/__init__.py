"""What neighbours cost: groups of modules side by side, the forms that predict them, and the plans of these forms."""
