"""The oldest versions of other packages that this one works with."""

OLDEST = {"numpy": (2, 0), "torch": (2, 10), "transformers": (4, 57)}
