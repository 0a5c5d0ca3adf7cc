"""Models of transformers in tiny sizes: each public function of a file returns a model and what makes its batches."""
