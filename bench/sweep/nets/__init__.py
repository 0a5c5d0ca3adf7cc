"""Unusual nets and loops: each public function of a file is a case."""
