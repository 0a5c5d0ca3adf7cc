"""The study of the solvers on random instances: proofs, times, gains over other planners."""
