"""Programs that record series of real faults for the tests of the alerts, and draw pictures for the documentation."""
