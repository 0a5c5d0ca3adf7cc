"""The planners that Mosaic is compared with, under the same cost model: one file each, over waves of whole devices."""
