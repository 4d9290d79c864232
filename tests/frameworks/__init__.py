"""The pages and modules for frameworks, in environments with their oldest and newest supported versions."""
