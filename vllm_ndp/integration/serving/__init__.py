"""What a running server tells: metrics, reports by request, status, a live page, spans. Decides nothing."""
