"""An event simulator of an eighth of a GPU: the truth that the forms are judged by, which knows none of them."""
