/*
 * Claim, deliver, settle and hand-over of one shard and one key, by several relays: a model for spin.
 *
 * Every `atomic` is one statement of PostgreSQL or one step of a relay. spin tries every order of them, every outcome
 * of a request and every moment for the faults. The parts of the model and of the product:
 *
 *   model                       product
 *   shard_owner, shard_epoch    outbox.shard. `lapsed`: the owner's session has ended by the database's clock.
 *   shard_locks                 the FOR SHARE locks of outbox.settle that is not committed: claim_shards.sql passes such
 *                               a shard by (SKIP LOCKED), release and reclaim wait for them.
 *   ledger_epoch, ledger_at     outbox.progress, of which positions.sql takes the newest by (epoch, seq). A position is
 *                               the number of the last event done: how it is found is the window's business, proved by
 *                               tests/property/test_window.py.
 *   row_*                       outbox.delivery: a row for each event, its lease (a uuid there, a number here).
 *   CLAIM                       Keeper._claim, claim_shards.sql
 *   RENEW                       Keeper._renew, renew_sessions.sql
 *   LOAD                        Reading._take_over: blocked keys first, then positions, two statements
 *   DELIVER                     Desk.set_aside, Desk.deliver, Desk.apply; `clock` is Holding.until, the relay's own clock
 *   SLOW                        RequestDelivering._park_under_way: a request that goes on becomes a leased row
 *   SETTLE                      Settling.flush, outbox.settle: the fence and the locks, then COMMIT
 *   UNBLOCK                     Rows._unblock, Blocked.settled and Blocked.free: a question, then what follows from it
 *   ROW                         Rows._claim_and_deliver and outbox.claim_rows, then delete_rows.sql or update_rows.sql
 *   RELEASE                     Reading._release, release_shards.sql: nothing in hand, all settled
 *   AGAIN                       the start of SinkRelay.run: reclaim_shards.sql, give_rows_back.sql
 *   CRASH                       a process that ends; its next life has another id. An open settlement commits or does not.
 *   faults                      leases end for their owner first, then in the database (ownership.py); the lease of a row
 *                               outlasts its request (LEASE_MARGIN_SECONDS).
 *
 * Errors, in any order of the steps:
 *
 *   - reorder: the first delivery of an event precedes that of an earlier one of its key (`taken`);
 *   - loss: the effective position covers an event that was not delivered and has no row, or a row is never delivered;
 *   - a settlement with rows commits after the shard has a new epoch, a position of an old epoch outranks one of a newer
 *     epoch, or a row is settled or given back under the lease of another relay;
 *   - a relay that does not own the shard delivers from the log;
 *   - a state without further steps in which an event is not delivered or a row is left.
 *
 * A position that moves back is no error. Of two relays that lost the shard, the late position of the later owner
 * outranks a larger one of the earlier owner. Both are true; a relay that starts from the smaller one delivers again.
 *
 * A definition omits a rule, and spin must then find an error; `python -m tests.model` checks both.
 *
 *   NO_EPOCH_CHECK   outbox.settle does not compare owner and epoch
 *   NO_SHARE_LOCK    outbox.settle compares them, but holds no lock until it commits
 *   NO_EPOCH_RANK    positions.sql takes the newest row by seq alone
 *   NO_BLOCKED_LOAD  a take-over does not load blocked keys
 *   NO_ROW_LEASE     delete_rows.sql and update_rows.sql do not compare the lease
 *   NO_HEAD_RULE     outbox.claim_rows claims rows that follow others of their key
 *   NO_ASKING_AFTER  an answer to a question from before the last settlement of a key unblocks the key
 *   NO_OWN_CLOCK     a relay delivers until it learns from the database that it lost the shard
 *
 * Bounds, which definitions can change except for the three events of the key: RELAYS, and the numbers of faults: FAILS,
 * LAPSES of the shard's lease, ROW_LAPSES, CRASHES and RELEASES.
 */

#ifndef RELAYS
#define RELAYS 2
#endif
#define EVENTS 3
#ifndef FAILS
#define FAILS 2
#endif
#ifndef LAPSES
#define LAPSES 2
#endif
#ifndef ROW_LAPSES
#define ROW_LAPSES 1
#endif
#ifndef CRASHES
#define CRASHES 1
#endif
#ifndef RELEASES
#define RELEASES 1
#endif

#define NOBODY 255
#define DEAD 254

/* Phases of a shard in a relay. */
#define NONE 0
#define CLAIMED 1
#define LOADED 2
#define OWNED 3
#define SETTLING 4
#define LOST 5

/* Phases of the row that a relay delivers. */
#define REQUEST 1
#define TAKEN 2
#define NOT_TAKEN 3

/* The database. Events are numbered from 1; bit n of a set is event n. */
byte shard_owner = NOBODY, shard_epoch = 0, shard_locks = 0;
bool lapsed = false;
byte ledger_epoch = 0, ledger_at = 0;
byte rows = 0;                     /* the events that are rows */
byte row_lease[EVENTS + 1];        /* 0: nobody's */
byte row_owner[EVENTS + 1];
bool row_lapsed[EVENTS + 1];
byte row_mine[RELAYS];             /* the lease under which each relay delivers a row, or will once it is one */

/* The destination, and how much may still happen. */
byte taken = 0;
byte fails = FAILS, lapses = LAPSES, row_lapses = ROW_LAPSES, crashes = CRASHES, releases = RELEASES;

/* Clocks of the relays: may it still deliver from the log, is its request for a row still under way. */
bool clock[RELAYS];
bool row_clock[RELAYS];

#define BIT(n) (1 << (n))
#define HAS(set, n) (((set) >> (n)) & 1)
#define UPTO(n) ((1 << ((n) + 1)) - 2)          /* the events 1 .. n */
#define ALL UPTO(EVENTS)

#ifdef NO_HEAD_RULE
#define HEAD(n) true
#else
#define HEAD(n) ((rows & (BIT(n) - 1)) == 0)    /* no earlier row of the key */
#endif
#define CLAIMABLE(n) (HAS(rows, n) && (row_lease[n] == 0 || row_lapsed[n]) && HEAD(n))
#define LEASED(n) (HAS(rows, n) && row_owner[n] < RELAYS && !row_lapsed[n])
#define ORPHAN(n) (HAS(rows, n) && row_owner[n] == DEAD && !row_lapsed[n])

/* What a stale write would break at once; left out with ONLY_CONSEQUENCES, to see what comes of it. */
#ifdef ONLY_CONSEQUENCES
#define not_stale(condition) skip
#else
#define not_stale(condition) assert(condition)
#endif

/* A lease that nobody has, and nobody will settle under. */
#define UNUSED(l) (row_lease[1] != l && row_lease[2] != l && row_lease[3] != l && NOT_MINE(l))
#if RELAYS == 2
#define NOT_MINE(l) (row_mine[0] != l && row_mine[1] != l)
#else
#define NOT_MINE(l) (row_mine[0] != l && row_mine[1] != l && row_mine[2] != l)
#endif
inline new_lease() {
    n = 1;
    do
    :: UNUSED(n) -> break
    :: else -> n++
    od;
    row_mine[me] = n;
    n = 0
}

inline take(n) {
    assert((taken & UPTO(n - 1)) == UPTO(n - 1));
    taken = taken | BIT(n)
}

/* A position is written: `epoch`, everything `upto` done. */
inline write_position(epoch, upto) {
    if
#ifdef NO_EPOCH_RANK
    :: true ->
#else
    :: epoch >= ledger_epoch ->
#endif
        not_stale(epoch >= ledger_epoch);
        ledger_epoch = epoch;
        ledger_at = upto;
        assert((UPTO(ledger_at) & ~(taken | rows)) == 0)
#ifndef NO_EPOCH_RANK
    :: else
#endif
    fi
}

/* COMMIT of a settlement: its rows, and then its position. */
inline commit() {
    insert_rows(settling, slow, row_mine[me], me);
    write_position(epoch, settling_at);
    settled = settling_at;
    if
    :: slow != 0 && HAS(settling, slow) -> slow = 0
    :: else
    fi;
    settling = 0; settling_at = 0;
    unlock();
    phase = OWNED
}

inline unlock() {
#ifdef NO_SHARE_LOCK
    skip
#else
    shard_locks--
#endif
}

/* New rows, on conflict do nothing; the one in `leased` is made with a lease. */
inline insert_rows(set, leased, lease, owner) {
    n = 1;
    do
    :: n <= EVENTS ->
        if
        :: HAS(set, n) && !HAS(rows, n) ->
            rows = rows | BIT(n);
            row_lapsed[n] = false;
            if
            :: n == leased -> row_lease[n] = lease; row_owner[n] = owner
            :: else -> row_lease[n] = 0; row_owner[n] = NOBODY
            fi
        :: else
        fi;
        n++
    :: else -> break
    od;
    n = 0
}

inline remove_row(m) {
    assert(HAS(taken, m));
    rows = rows & ~BIT(m);
    row_lease[m] = 0;
    row_owner[m] = NOBODY;
    row_lapsed[m] = false
}

inline free_row(m) {
    row_lease[m] = 0;
    row_owner[m] = NOBODY;
    row_lapsed[m] = false
}

/* What a relay has in memory of a session is gone. */
inline forget() {
    phase = NONE; epoch = 0; at = 0; settled = 0; blocked = false; parked = 0; asked = false;
    settling = 0; settling_at = 0; slow = 0;
    row = 0; row_mine[me] = 0; row_phase = 0
}

proctype relay(byte me) {
    byte phase = NONE;     /* of the shard */
    byte epoch = 0;        /* at which it was claimed */
    byte at = 0;           /* the log is done up to here: delivered, or parked */
    byte settled = 0;      /* the position that is written */
    byte parked = 0;       /* rows of the next settlement */
    bool blocked = false;  /* later events become rows */
    bool asked = false;    /* a question has shown that no row is left, and nothing was parked since */
    byte settling = 0;     /* rows of the settlement under way */
    byte settling_at = 0;  /* and its position */
    byte slow = 0;         /* the event that is parked with its request under way */
    byte row = 0, row_phase = 0;   /* the row, or slow event, that is being delivered */
    byte n = 0;

end:
    do
    /* CLAIM */
    :: atomic { phase == NONE && shard_locks == 0 && (shard_owner == NOBODY || (lapsed && shard_owner != me)) ->
        shard_owner = me; shard_epoch++; lapsed = false; clock[me] = true;
        epoch = shard_epoch; phase = CLAIMED }

    /* RENEW: what does not come back is lost. */
    :: atomic { phase != NONE && phase != LOST && !clock[me] ->
        if
        :: shard_owner == me && shard_epoch == epoch -> lapsed = false; clock[me] = true
        :: else -> phase = LOST
        fi }

    /* LOAD */
    :: atomic { phase == CLAIMED ->
#ifdef NO_BLOCKED_LOAD
        blocked = false;
#else
        blocked = (rows != 0);
#endif
        phase = LOADED }
    :: atomic { phase == LOADED -> at = ledger_at; settled = at; phase = OWNED }

    /* DELIVER, from the log. */
    :: atomic { (phase == OWNED || phase == SETTLING) && at < EVENTS && blocked ->
        at++; parked = parked | BIT(at); asked = false }
#ifdef NO_OWN_CLOCK
    :: atomic { (phase == OWNED || phase == SETTLING) && at < EVENTS && !blocked ->
#else
    :: atomic { (phase == OWNED || phase == SETTLING) && at < EVENTS && !blocked && clock[me] ->
#endif
        not_stale(shard_owner == me && shard_epoch == epoch);
        at++;
        if
        :: take(at)
        :: fails > 0 -> fails--; parked = parked | BIT(at); blocked = true; asked = false
        :: fails > 0 -> take(at); fails--; parked = parked | BIT(at); blocked = true; asked = false
        /* SLOW */
        :: row_phase == 0 && slow == 0 ->
            new_lease(); slow = at; row = at; row_phase = REQUEST;
            row_clock[me] = true; parked = parked | BIT(at); blocked = true; asked = false
        fi }

    /* SETTLE. Positions alone have no fence. */
    :: atomic { phase == OWNED && parked == 0 && at > settled ->
        write_position(epoch, at); settled = at }
    :: atomic { phase == OWNED && parked != 0 ->
        if
#ifdef NO_EPOCH_CHECK
        :: true ->
#else
        :: shard_owner == me && shard_epoch == epoch ->
#endif
            settling = parked; settling_at = at; parked = 0;
#ifndef NO_SHARE_LOCK
            shard_locks++;
#endif
            phase = SETTLING
#ifndef NO_EPOCH_CHECK
        :: else -> phase = LOST
#endif
        fi }
    :: atomic { phase == SETTLING ->
        not_stale(shard_epoch == epoch);
        commit() }

    /* UNBLOCK: asked about after the last settlement of the key, and believed only if nothing was parked since. */
#ifdef NO_ASKING_AFTER
    :: atomic { (phase == OWNED || phase == SETTLING) && blocked && !asked && rows == 0 -> asked = true }
    :: atomic { (phase == OWNED || phase == SETTLING) && asked -> blocked = false; asked = false }
#else
    :: atomic { phase == OWNED && blocked && parked == 0 && !asked && rows == 0 -> asked = true }
    :: atomic { (phase == OWNED || phase == SETTLING) && asked -> blocked = false; asked = false }
#endif

    /* RELEASE, with nothing in hand. */
    :: atomic { phase == OWNED && releases > 0 && parked == 0 && at == settled && slow == 0 && shard_locks == 0 ->
        releases--;
        if
        :: shard_owner == me && shard_epoch == epoch -> shard_owner = NOBODY; lapsed = false
        :: else
        fi;
        phase = NONE; epoch = 0; at = 0; settled = 0; blocked = false; asked = false; clock[me] = false }

    /* AGAIN: after a fence has failed. */
    :: atomic { phase == LOST && shard_locks == 0 ->
        forget();
        clock[me] = false; row_clock[me] = false;
        n = 1;
        do
        :: n <= EVENTS -> if :: row_owner[n] == me -> free_row(n) :: else fi; n++
        :: else -> break
        od;
        n = 0;
        if
        :: shard_owner == me -> shard_epoch++; lapsed = false; clock[me] = true; epoch = shard_epoch; phase = CLAIMED
        :: else
        fi }

    /* ROW: claimed, delivered, settled. */
    :: atomic { row_phase == 0 && (CLAIMABLE(1) || CLAIMABLE(2) || CLAIMABLE(3)) ->
        if
        :: CLAIMABLE(1) -> row = 1
        :: CLAIMABLE(2) -> row = 2
        :: CLAIMABLE(3) -> row = 3
        fi;
        new_lease(); row_lease[row] = row_mine[me]; row_owner[row] = me; row_lapsed[row] = false;
        row_phase = REQUEST; row_clock[me] = true }
    :: atomic { row_phase == REQUEST && row_clock[me] -> take(row); row_phase = TAKEN }
    :: atomic { row_phase == REQUEST && row_clock[me] && fails > 0 -> fails--; row_phase = NOT_TAKEN }
    :: atomic { row_phase == REQUEST && row_clock[me] && fails > 0 -> take(row); fails--; row_phase = NOT_TAKEN }
    :: atomic { row_phase == REQUEST && !row_clock[me] -> row_phase = NOT_TAKEN }
    :: atomic { row_phase == TAKEN && slow == 0 ->
        if
#ifdef NO_ROW_LEASE
        :: HAS(rows, row) ->
#else
        :: HAS(rows, row) && row_lease[row] == row_mine[me] ->
#endif
            not_stale(row_lease[row] == row_mine[me]);
            remove_row(row)
        :: else
        fi;
        row = 0; row_mine[me] = 0; row_phase = 0; row_clock[me] = false }
    :: atomic { row_phase == NOT_TAKEN && slow == 0 ->
        if
#ifdef NO_ROW_LEASE
        :: HAS(rows, row) ->
#else
        :: HAS(rows, row) && row_lease[row] == row_mine[me] ->
#endif
            not_stale(row_lease[row] == row_mine[me]);
            free_row(row)
        :: else
        fi;
        row = 0; row_mine[me] = 0; row_phase = 0; row_clock[me] = false }

    /* CRASH */
    :: atomic { crashes > 0 && (phase != NONE || row_phase != 0) ->
        crashes--;
        if
        :: phase == SETTLING ->
            if
            :: commit()
            :: unlock()
            fi
        :: else
        fi;
        if :: shard_owner == me -> shard_owner = DEAD :: else fi;
        n = 1;
        do
        :: n <= EVENTS -> if :: row_owner[n] == me -> row_owner[n] = DEAD :: else fi; n++
        :: else -> break
        od;
        n = 0;
        forget();
        clock[me] = false; row_clock[me] = false }
    od
}

/* Time: leases end. A request for a row has ended by then, and so has the right to deliver from the log. */
proctype time() {
    byte n = 0;
end:
    do
    :: atomic { lapses > 0 && shard_owner < RELAYS && !lapsed ->
        lapses--; clock[shard_owner] = false; lapsed = true }
    :: atomic { shard_owner == DEAD && !lapsed -> lapsed = true }
    :: atomic { row_lapses > 0 && (LEASED(1) || LEASED(2) || LEASED(3)) ->
        if
        :: LEASED(1) -> n = 1
        :: LEASED(2) -> n = 2
        :: LEASED(3) -> n = 3
        fi;
        row_lapses--; row_clock[row_owner[n]] = false; row_lapsed[n] = true; n = 0 }
    :: atomic { ORPHAN(1) -> row_lapsed[1] = true }
    :: atomic { ORPHAN(2) -> row_lapsed[2] = true }
    :: atomic { ORPHAN(3) -> row_lapsed[3] = true }
    :: timeout ->
        assert(taken == ALL && rows == 0);
        break
    od
}

init {
    byte n = 0;
    atomic {
        do
        :: n <= EVENTS -> row_owner[n] = NOBODY; n++
        :: else -> break
        od;
        n = 0;
        do
        :: n < RELAYS -> run relay(n); n++
        :: else -> break
        od;
        n = 0;
        run time()
    }
}
