"""The study of the solvers on generated instances: proofs, times, gains over other planners."""
