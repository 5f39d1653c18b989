"""Which optimizer, and how we know: tasks, contenders, trials, and what is read from them."""
