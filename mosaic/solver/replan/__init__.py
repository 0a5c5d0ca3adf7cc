"""Planning again: after modules come or go, after measurements, with what earlier searches know."""
