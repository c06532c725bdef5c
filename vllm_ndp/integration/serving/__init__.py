"""Output of a running server: metrics, reports by request, status, a live page, spans. Decides nothing."""
