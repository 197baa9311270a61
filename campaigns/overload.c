/* Loads an HTTP server in open or closed loop, over one thread with epoll. Built by campaigns/overload.py.
 *
 *     overload PORT CONNECTIONS RATE SECONDS SEED REQUESTS
 *
 * RATE 0: closed loop; each connection sends its next request when its answer is whole. RATE > 0: open loop; requests a second,
 * their times drawn ahead (Poisson), whatever the server does. A request whose time has come and that finds no free connection
 * waits in line. Latency is counted from the drawn time, so a slow server is not spared (no coordinated omission).
 * REQUESTS: a file of whole HTTP requests, each after its length (uint32, little-endian); they are sent in turn.
 *
 * Prints one JSON object: counts by status, latencies of what was answered 200 ("good" from the due time, "served" from the
 * sending), and of what was refused; answers of each second; and what the generator
 * itself was doing: its share of a core, how late it saw that a request's time had come, requests left unsent.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <math.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum state { CLOSED, CONNECTING, IDLE, SENDING, HEAD, BODY };
enum { HEAD_BYTES = 8192, MAX_SECONDS = 3600, GRACE_S = 3 };

struct request {
    const char *bytes;
    size_t size;
};

struct connection {
    int fd;
    enum state state;
    const struct request *request;
    size_t sent, head_size, body_left;
    double scheduled, started;
    int status, closes;
    char head[HEAD_BYTES];
};

struct list { /* of doubles, growing */
    double *values;
    size_t size, room;
};

static int port, epoll, count;
static struct connection *all, **free_ones;
static int free_count;
static struct request *requests;
static size_t request_count, next_request;
static struct list good, served, refused, late; /* in s: latencies from the due time, from the sending; lateness */
static struct list waiting;                       /* due times of requests that wait in line */
static size_t first_waiting;
static long by_status[600], broken, sent_requests, good_each[MAX_SECONDS], refused_each[MAX_SECONDS];
static double began, ends;
static int open_loop;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void die(const char *what) {
    fprintf(stderr, "overload: %s: %s\n", what, strerror(errno));
    exit(1);
}

static void append(struct list *list, double value) {
    if (list->size == list->room) {
        list->room = list->room ? 2 * list->room : 1 << 16;
        if (!(list->values = realloc(list->values, list->room * sizeof(double)))) die("memory");
    }
    list->values[list->size++] = value;
}

static void watch(struct connection *c, int operation, uint32_t events) {
    struct epoll_event event = {.events = events, .data.ptr = c};
    if (epoll_ctl(epoll, operation, c->fd, &event)) die("epoll_ctl");
}

static void begin(struct connection *c, double scheduled);

/* The connection is free: it takes what waits in line, or in closed loop the next request at once. */
static void release(struct connection *c) {
    if (!open_loop && now() < ends) {
        begin(c, now());
    } else if (open_loop && first_waiting < waiting.size && now() < ends) {
        begin(c, waiting.values[first_waiting++]);
    } else {
        free_ones[free_count++] = c;
    }
}

static void drop(struct connection *c) {
    close(c->fd);
    c->state = CLOSED;
}

static void lose(struct connection *c) {
    enum state before = c->state;
    drop(c);
    if (before == IDLE) return; /* it stays among the free ones, and connects anew when it is taken */
    broken++;
    if (before == CONNECTING) { /* the server takes no more connections for now: no busy loop of attempts */
        free_ones[free_count++] = c;
        return;
    }
    release(c);
}

static void send_on(struct connection *c) {
    while (c->sent < c->request->size) {
        ssize_t n = send(c->fd, c->request->bytes + c->sent, c->request->size - c->sent, MSG_NOSIGNAL);
        if (n < 0 && errno == EAGAIN) {
            if (c->state != SENDING) watch(c, EPOLL_CTL_MOD, EPOLLIN | EPOLLOUT | EPOLLRDHUP);
            c->state = SENDING;
            return;
        }
        if (n < 0) {
            if (c->state != SENDING) c->state = SENDING;
            return; /* the server may have refused and closed: its answer is read, or the loss is seen, as an event */
        }
        c->sent += n;
    }
    if (c->state == SENDING) watch(c, EPOLL_CTL_MOD, EPOLLIN | EPOLLRDHUP);
    c->state = HEAD;
}

static void start_sending(struct connection *c) {
    c->sent = c->head_size = 0;
    c->started = now();
    c->state = HEAD;
    sent_requests++;
    send_on(c);
}

static void begin(struct connection *c, double scheduled) {
    c->scheduled = scheduled;
    c->request = &requests[next_request++ % request_count];
    if (c->state == IDLE) {
        start_sending(c);
        return;
    }
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int one = 1;
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (c->fd < 0) die("socket");
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (connect(c->fd, (struct sockaddr *)&address, sizeof address) && errno != EINPROGRESS) {
        close(c->fd);
        c->state = CLOSED;
        broken++;
        free_ones[free_count++] = c;
        return;
    }
    c->state = CONNECTING;
    watch(c, EPOLL_CTL_ADD, EPOLLIN | EPOLLOUT | EPOLLRDHUP);
}

static void finish(struct connection *c) {
    double at = now(), latency = at - c->scheduled;
    int second = (int)(at - began);
    by_status[c->status]++;
    append(c->status == 200 ? &good : &refused, latency);
    if (c->status == 200) append(&served, at - c->started);
    if (second < MAX_SECONDS) (c->status == 200 ? good_each : refused_each)[second]++;
    if (c->closes || c->sent < c->request->size) {
        drop(c);
    } else {
        c->state = IDLE;
    }
    release(c);
}

/* Understands a whole head; 0 where it is none of ours. */
static int understand(struct connection *c, char *end) {
    char *line;
    end[2] = 0;
    if (sscanf(c->head, "HTTP/1.1 %d", &c->status) != 1 || c->status < 100 || c->status > 599) return 0;
    c->closes = strcasestr(c->head, "\r\nconnection: close") != NULL;
    line = strcasestr(c->head, "\r\ncontent-length:");
    if (!line) return 0;
    c->body_left = strtoull(line + 17, NULL, 10);
    return 1;
}

static void receive(struct connection *c) {
    static char sink[1 << 20];
    for (;;) {
        int in_body = c->state == BODY;
        ssize_t n = in_body ? recv(c->fd, sink, sizeof sink, 0)
                            : recv(c->fd, c->head + c->head_size, HEAD_BYTES - 1 - c->head_size, 0);
        if (n < 0 && errno == EAGAIN) return;
        if (n <= 0 || c->state == IDLE) { /* bytes that nobody asked for count as a loss as well */
            lose(c);
            return;
        }
        if (!in_body) {
            char *end;
            c->head_size += n;
            c->head[c->head_size] = 0;
            if (!(end = strstr(c->head, "\r\n\r\n"))) continue;
            n = c->head_size - (end + 4 - c->head);
            if (!understand(c, end)) {
                lose(c);
                return;
            }
            c->state = BODY;
        }
        if ((size_t)n > c->body_left) {
            lose(c);
            return;
        }
        c->body_left -= n;
        if (!c->body_left) {
            finish(c);
            return;
        }
    }
}

static void handle(struct connection *c, uint32_t events) {
    if (c->state == CLOSED) return;
    if (c->state == CONNECTING) {
        if (events & (EPOLLERR | EPOLLHUP)) {
            lose(c);
            return;
        }
        watch(c, EPOLL_CTL_MOD, EPOLLIN | EPOLLRDHUP);
        start_sending(c);
        return;
    }
    if (events & (EPOLLIN | EPOLLERR | EPOLLHUP | EPOLLRDHUP)) receive(c);
    if (c->state == SENDING && (events & EPOLLOUT)) send_on(c);
}

static void read_requests(const char *path) {
    FILE *file = fopen(path, "rb");
    uint32_t size;
    if (!file) die(path);
    while (fread(&size, 4, 1, file) == 1) {
        char *bytes = malloc(size);
        if (!bytes || fread(bytes, 1, size, file) != size) die(path);
        requests = realloc(requests, (request_count + 1) * sizeof *requests);
        requests[request_count++] = (struct request){bytes, size};
    }
    fclose(file);
    if (!request_count) die(path);
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void print_latencies(const char *name, struct list *list) {
    qsort(list->values, list->size, sizeof(double), ascending);
    printf("\"%s\": {\"count\": %zu", name, list->size);
    if (list->size)
        printf(", \"p50_s\": %.6f, \"p90_s\": %.6f, \"p99_s\": %.6f, \"max_s\": %.6f", list->values[list->size / 2],
               list->values[list->size * 90 / 100], list->values[list->size * 99 / 100], list->values[list->size - 1]);
    printf("}, ");
}

static void print_seconds(const char *name, const long *each, int seconds) {
    printf("\"%s\": [", name);
    for (int i = 0; i < seconds; i++) printf("%s%ld", i ? ", " : "", each[i]);
    printf("], ");
}

static void print(double seconds, double cpu_s, double wall_s) {
    long in_flight = 0;
    for (int i = 0; i < count; i++) in_flight += all[i].state >= SENDING || all[i].state == CONNECTING;
    printf("{\"by_status\": {");
    for (int i = 0, first = 1; i < 600; i++)
        if (by_status[i]) printf("%s\"%d\": %ld", first ? "" : ", ", i, by_status[i]), first = 0;
    printf("}, ");
    print_latencies("good", &good);
    print_latencies("served", &served);
    print_latencies("refused", &refused);
    print_latencies("late", &late);
    print_seconds("good_each_second", good_each, (int)ceil(seconds));
    print_seconds("refused_each_second", refused_each, (int)ceil(seconds));
    printf("\"sent\": %ld, \"broken\": %ld, \"unanswered\": %ld, \"unsent\": %zu, ", sent_requests, broken, in_flight,
           waiting.size - first_waiting);
    printf("\"generator_core_fraction\": %.3f, \"seconds\": %.3f}\n", cpu_s / wall_s, seconds);
}

int main(int argc, char **argv) {
    if (argc != 7) {
        fprintf(stderr, "usage: overload PORT CONNECTIONS RATE SECONDS SEED REQUESTS\n");
        return 2;
    }
    port = atoi(argv[1]);
    count = atoi(argv[2]);
    double rate = atof(argv[3]), seconds = atof(argv[4]), arrival;
    struct epoll_event events[256];
    struct rusage usage;
    srand48(atol(argv[5]));
    read_requests(argv[6]);
    open_loop = rate > 0;
    epoll = epoll_create1(EPOLL_CLOEXEC);
    all = calloc(count, sizeof *all);
    free_ones = calloc(count, sizeof *free_ones);
    if (epoll < 0 || !all || !free_ones || seconds > MAX_SECONDS) die("start");
    began = now();
    ends = began + seconds;
    arrival = began;
    for (int i = count - 1; i >= 0; i--) free_ones[free_count++] = &all[i];
    while (!open_loop && free_count) begin(free_ones[--free_count], now());
    for (;;) {
        double at = now(), wait = 0.05;
        for (; open_loop && arrival <= at && arrival < ends; arrival -= log(1 - drand48()) / rate) {
            append(&waiting, arrival);
            append(&late, at - arrival);
        }
        for (; free_count && first_waiting < waiting.size && at < ends; at = now())
            begin(free_ones[--free_count], waiting.values[first_waiting++]);
        if (!open_loop && free_count && at < ends) begin(free_ones[--free_count], at); /* one that could not connect */
        if (at > ends + GRACE_S || (at > ends && free_count == count)) break;
        if (open_loop && arrival < ends) wait = fmax(0, fmin(wait, arrival - at));
        struct timespec timeout = {0, (long)(wait * 1e9)};
        int ready = epoll_pwait2(epoll, events, 256, &timeout, NULL);
        if (ready < 0 && errno != EINTR) die("epoll_wait");
        for (int i = 0; i < ready; i++) handle(events[i].data.ptr, events[i].events);
    }
    getrusage(RUSAGE_SELF, &usage);
    print(seconds, usage.ru_utime.tv_sec + usage.ru_stime.tv_sec + (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6,
          now() - began);
    return 0;
}
