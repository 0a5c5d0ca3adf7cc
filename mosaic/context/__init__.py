"""Long sequences split over ranks by the work of their attention: masks, tiles, who gets which blocks."""
