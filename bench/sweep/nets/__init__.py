"""Odd nets and loops: each public function of a file is a case, written as a person writes it."""
