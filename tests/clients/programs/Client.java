import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;

/**
 * The JDK's own client: HTTP/2 first (an upgrade from HTTP/1.1, which a server may pass over), then HTTP/1.1.
 *
 * Takes the bodies to send from its arguments, plain and streamed; prints what came, a line of JSON for each case.
 */
class Client {
    static final String URL = System.getenv("OPENAI_BASE_URL") + "/chat/completions";

    public static void main(String[] bodies) throws Exception {
        for (HttpClient.Version version : List.of(HttpClient.Version.HTTP_2, HttpClient.Version.HTTP_1_1)) {
            HttpClient client = HttpClient.newBuilder()
                .version(version).connectTimeout(Duration.ofSeconds(10)).build();
            HttpResponse<String> whole = client.send(request(bodies[0]), HttpResponse.BodyHandlers.ofString());
            say("chat_" + version, whole.statusCode(), List.of(whole.body()));
            // Lines as they come; the second request on the same connection.
            List<String> lines = new ArrayList<>();
            var stream = client.send(request(bodies[1]), HttpResponse.BodyHandlers.ofLines());
            stream.body().forEach(lines::add);
            say("stream_" + version, stream.statusCode(), lines);
        }
    }

    static HttpRequest request(String body) {
        return HttpRequest.newBuilder(URI.create(URL))
            .timeout(Duration.ofSeconds(60))
            .header("Content-Type", "application/json")
            .header("Authorization", "Bearer " + System.getenv("OPENAI_API_KEY"))
            .POST(HttpRequest.BodyPublishers.ofString(body, StandardCharsets.UTF_8))
            .build();
    }

    static void say(String name, int status, List<String> lines) {
        StringBuilder line = new StringBuilder("CASE {\"case\": \"" + name + "\", \"came\": [" + status);
        for (String each : lines) {
            line.append(", \"").append(escaped(each)).append('"');
        }
        byte[] bytes = line.append("]}\n").toString().getBytes(StandardCharsets.UTF_8);
        System.out.write(bytes, 0, bytes.length);
        System.out.flush();
    }

    static String escaped(String text) {
        return text.replace("\\", "\\\\").replace("\"", "\\\"").replace("\n", "\\n").replace("\t", "\\t");
    }
}
