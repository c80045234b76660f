"""Problems: frozen descriptions of a call, without tensors. They print as one line and key the dispatch memo."""
