"""Many requests in one forward: jobs, the rows that each may have, and the thread they live in."""
