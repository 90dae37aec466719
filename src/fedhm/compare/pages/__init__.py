"""What a comparison shows and leaves on disk: tables, figures, pages."""
