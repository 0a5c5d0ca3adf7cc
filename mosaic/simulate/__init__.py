"""A simulator of one step of a plan without barriers between its stages."""
