"""Parts of the benchmark scripts. Nothing of the packages depends on them."""
