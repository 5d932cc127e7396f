"""How the mean is computed: what is averaged, in which buckets, over which groups."""
