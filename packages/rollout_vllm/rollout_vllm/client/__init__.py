"""The HTTP client: requests, dispatch, retries, partial rollouts, metrics."""
