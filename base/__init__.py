"""The ground floor, needed by every folder: errors, files, progress, ranks and statistics."""
